"""What a plan implies, as pure arithmetic: no torch, no numpy, no measurement."""
