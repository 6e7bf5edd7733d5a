"""What everybody may know of a cluster: settings, topology, meshes, slices, and where virtual devices are."""
