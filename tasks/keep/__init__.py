"""A recipe of configurations: learn new answers, and keep the others within a KL budget."""
