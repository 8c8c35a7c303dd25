"""Our subtrees beside their upstreams: what is mirrored, what is missing, what differs."""
