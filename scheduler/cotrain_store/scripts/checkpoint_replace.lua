-- checkpoint_replace: replace a checkpoint if it has not changed since the writer read it.
-- needs: checkpoint_index
local checkpoint = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if redis.call('GET', checkpoint) ~= args.before then
  return 'OUTDATED'
end
write_checkpoint(args.after, cjson.decode(args.after))
return 'OK'
