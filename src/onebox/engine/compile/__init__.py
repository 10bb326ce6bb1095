"""Compilation of a plan's steps into one routine for each worker; pure, sends nothing, which ``install`` does."""
