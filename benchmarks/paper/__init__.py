"""Figures and tables of the paper (Barham et al., MLSys 2022, section 5), beside the peers."""
