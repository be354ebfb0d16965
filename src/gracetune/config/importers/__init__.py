"""Turn the config files of other trainers into run files, with a report of every key."""
