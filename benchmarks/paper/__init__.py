"""The paper's figures and tables (Barham et al., MLSys 2022, section 5), beside the peers."""
