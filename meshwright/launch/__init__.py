"""What starts a plan on a cluster: files for other people's schedulers, and the ranks of one machine."""
