"""Where simulated requests come from: public traces, and generated loads."""
