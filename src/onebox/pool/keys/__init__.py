"""CURVE keys: the user's own, those of known peers, their files, and pairing."""
