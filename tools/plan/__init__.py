"""The whole of a run, planned before anybody rents a card: memory, collectives and time of every rank."""
