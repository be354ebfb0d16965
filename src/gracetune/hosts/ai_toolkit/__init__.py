"""Run gracetune inside an unmodified ai-toolkit, through one small file in its `extensions` folder.

ai-toolkit is not a package: it runs from a clone, and is imported only in its own process.
"""
