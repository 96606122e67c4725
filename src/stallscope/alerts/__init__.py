"""Alerts: one for each incident, raised, updated and resolved at the receivers of alerts.yaml."""
