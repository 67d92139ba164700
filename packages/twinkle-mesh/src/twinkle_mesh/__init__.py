"""Device meshes and device groups: topology, data ranks and placement for distributed training."""
