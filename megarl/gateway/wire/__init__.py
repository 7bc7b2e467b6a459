"""The requests and responses of the APIs that the gateway speaks."""
