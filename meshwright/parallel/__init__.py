"""How a plain model is spread over ranks: one technique a file, each the identity when its degree is one."""
