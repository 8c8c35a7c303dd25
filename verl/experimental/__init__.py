"""Parts that upstream keeps apart from its main packages."""
