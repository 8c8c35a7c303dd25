"""Plans a run before a device is rented: memory, collectives and time of every rank."""
