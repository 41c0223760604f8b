"""Device mesh, pipeline channels and rendezvous."""
