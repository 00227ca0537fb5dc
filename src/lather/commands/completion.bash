_lather() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""
    [[ $COMP_CWORD -gt 2 && $command == data ]] && command="data ${COMP_WORDS[2]}"
    if [[ $COMP_CWORD -eq 1 ]]; then
        words=@commands@
    else
        case "$command $previous" in
@values@
        esac
        if [[ -z $words && $current == -* ]]; then
            case "$command" in
@options@
            esac
        fi
    fi
    COMPREPLY=()
    [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _lather lather
