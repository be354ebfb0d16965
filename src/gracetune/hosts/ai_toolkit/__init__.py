"""gracetune inside an unmodified ai-toolkit: one small file in its `extensions` folder.

ai-toolkit is no package: it is run from a clone, and only ever imported in a process of its own.
"""
