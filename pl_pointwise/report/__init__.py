"""What a run tells at its end: its history, the closing table, and a page to open."""
