"""Clusters as other systems start them: manifests for Kubernetes, batch scripts for Slurm. Text in, text out."""
