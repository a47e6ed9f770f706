"""One sandbox session: the supervisor process with its relay, watchdog, telemetry and teardown."""
