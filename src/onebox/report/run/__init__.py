"""The record of a run: its folder, its metrics, its progress on the terminal; tables and figures of it are beside this
package."""
