"""Names as data: what each model family calls its modules, and how each tool spells a key."""
