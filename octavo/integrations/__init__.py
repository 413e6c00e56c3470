"""Other frameworks' servers, harnesses and configurations. Nothing imports it but cli, lazily."""
