"""Many jobs over many GPUs, machines or servers. The folder of outputs is the only state."""
