"""Accelerators, links, clusters, software stacks and measured profiles: data, and how a name finds its entry."""
