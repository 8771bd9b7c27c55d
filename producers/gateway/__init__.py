"""The HTTP front door: the OpenAI API over a lane's queues, one process of any number of them."""
