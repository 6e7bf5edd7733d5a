"""Manifests for Kubernetes and batch scripts for Slurm. These modules only build text: they start nothing."""
