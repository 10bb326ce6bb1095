"""Messages of the protocol: requests, instructions, responses, and those between a client and an agent. Programs and
tensors, which they carry, are beside this folder."""
