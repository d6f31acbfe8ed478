"""Speed as a client of a server sees it: load by known tools, times read on the wire by one observer."""
