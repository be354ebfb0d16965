"""Run gracetune inside an unmodified SimpleTuner.

SimpleTuner is licensed under the AGPL; it is imported only in the process that it runs in.
"""
