"""The hub's page for one machine: a node trace in a temporary store, served on 127.0.0.1 or saved as one HTML file."""
