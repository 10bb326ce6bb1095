"""The virtual tensor and what it is made of: layout, buffer handle, storage; nothing that sends."""
