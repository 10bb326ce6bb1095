"""The work of a feed's stages: reading, decoding, transforming and collating samples; no threads or processes are
started here."""
