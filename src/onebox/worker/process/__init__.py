"""Entry points and threads of a worker process: configuration and message loop, heartbeat, and the server that forks
workers. No instruction is executed here."""
