"""gracetune inside an unmodified SimpleTuner: what it hooks, and what it puts there.

SimpleTuner is licensed under the AGPL and is only ever imported in a process that it runs in.
"""
