"""Who may do what on a cluster's TCP ports: its authority, the strings that let others join, and how they join."""
