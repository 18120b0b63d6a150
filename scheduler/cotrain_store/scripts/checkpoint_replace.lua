-- checkpoint_replace: write a checkpoint anew, if it still is what the writer read.
-- needs: checkpoint_index
local checkpoint = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if redis.call('GET', checkpoint) ~= args.before then
  return 'OUTDATED'
end
write_checkpoint(args.after, cjson.decode(args.after))
return 'OK'
