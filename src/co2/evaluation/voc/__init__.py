"""PASCAL VOC: its files, and the protocols that are judged on them."""
