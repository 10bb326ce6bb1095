"""From nodes of a joint graph to programs: segments, phases, lowering, slices; the graph itself is not changed here."""
