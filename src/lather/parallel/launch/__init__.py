"""Starting ranks on one machine or joining those of several, watching them, and ending them as one."""
