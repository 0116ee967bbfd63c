"""Ray: start it or join a cluster, wait for its resources, submit a command as a job."""
