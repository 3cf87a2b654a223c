"""A recipe of configurations: forget some answers, as far as is asked, and keep the others."""
