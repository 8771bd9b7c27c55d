"""The broker: decides which job may run now, and on which worker."""
