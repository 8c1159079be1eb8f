"""Every Triton kernel but those that make views: what is computed, over which bytes, heads each file."""
