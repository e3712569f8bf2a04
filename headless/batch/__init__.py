"""Many jobs over many GPUs, machines or servers, with the folder of outputs as the only state."""
