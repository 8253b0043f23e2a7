"""Who and where: identity, addresses, discovery, the run file, the seed node."""
