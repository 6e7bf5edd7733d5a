"""The systems that figure 5 sets beside Pathways, with the same computation."""
