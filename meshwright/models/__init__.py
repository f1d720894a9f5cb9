"""The models: plain modules that believe their tensors are whole. Nothing here knows how it is cut."""
