-- checkpoint_replace: replace a checkpoint if it has not changed since the writer read it.
-- needs: checkpoint_index
local args = cjson.decode(ARGV[1])
local after = cjson.decode(args.after)

if redis.call('GET', 'cotrain:checkpoint:' .. member_of(after)) ~= args.before then
  return 'OUTDATED'
end
write_checkpoint(args.after, after)
return 'OK'
