"""What runs in a program's process before the program.

Imported there as a package of its own, ``inside``, and with few modules: to import verl's packages takes longer than
most programs. So its modules name each other relatively.
"""
