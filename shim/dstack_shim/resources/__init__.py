"""What tasks take from the host: GPUs, SSH keys, volumes, instance directories.

The adapters know an owner's id and its config, nothing else of tasks and nothing of Docker.
Each takes for an owner, gives back by owner, and counts what there is. Apart from the GPU
locks they remember nothing that a restart would lose: the records of the unreleased tasks are
handed in, the host is looked at, and the two are made to agree.
"""
